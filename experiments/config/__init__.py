"""Configuration schema: pydantic models without torch, one module per concern."""
