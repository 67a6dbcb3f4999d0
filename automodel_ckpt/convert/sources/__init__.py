"""External formats: one module per format, which describes its files as slices.

``format.py`` is the interface, ``registry.py`` the list of formats in order of precedence. Imports no torch.
"""
