"""From samples to batches: order, packing, workers."""
