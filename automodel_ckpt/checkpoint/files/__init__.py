"""Files: durable writing, safe opening, and the formats of their contents."""
