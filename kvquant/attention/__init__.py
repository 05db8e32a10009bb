"""Attention over tokens as they are and blocks of codes."""
