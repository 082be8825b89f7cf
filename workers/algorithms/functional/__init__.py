"""Losses, advantages and divergences as plain functions on packed tensors."""
