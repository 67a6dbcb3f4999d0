"""Files as such: written durably, opened without trust, and the formats of what stands in them."""
