"""The version of this package, and of installed ones. Imports no library."""

__version__ = "0.1.0"


def version_of(package: str) -> str | None:
    """The installed version; None where the package is not installed, or runs from its source."""
    # Its import takes longer than a command's.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
