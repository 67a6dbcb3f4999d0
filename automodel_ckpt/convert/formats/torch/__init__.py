"""Files of torch: state dicts and DCP directories, with the state of optimizers."""
