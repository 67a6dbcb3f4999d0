"""Data of the examples that need no network: text of the Python installation, scans of scikit-learn, made-up data."""
