"""Where sealed payloads lie when they are not all on the device: bytes by key, moved between tiers; no codec here."""
