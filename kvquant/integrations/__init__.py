"""Adapters to serving engines, one engine a file. None is imported before it is named."""
