"""Example recipes, and the data that the small ones train on."""
