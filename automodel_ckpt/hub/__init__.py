"""Models on the Hugging Face Hub: uploading an export or an adapter with its card, and downloading it."""
