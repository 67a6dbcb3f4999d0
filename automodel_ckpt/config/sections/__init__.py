"""The sections of a recipe file: one dataclass each, whose fields have a type, a default, rules and documentation."""
