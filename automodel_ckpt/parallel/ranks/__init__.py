"""Agreement between ranks, stop requests, hangs."""
