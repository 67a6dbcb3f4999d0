"""What a checkpoint consists of: slices, trees of tensors, the manifest, the commit and the verification."""
