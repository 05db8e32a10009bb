"""Shipped policies, installed as the package ``kvquant.presets``."""
