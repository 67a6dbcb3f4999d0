"""Data sets, the global data order and its loader. Import what you need from the modules; nothing is loaded here."""
