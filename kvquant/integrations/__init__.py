"""Adapters to serving engines, one a file. An engine is imported when its adapter's class is first asked for."""
