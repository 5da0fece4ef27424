"""Adapters beside frozen layers: where they are put, their values, their files, and the model they are added to."""
