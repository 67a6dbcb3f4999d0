"""Recipes of NeMo AutoModel become recipes of this program: tables of its keys, and what reads them."""
