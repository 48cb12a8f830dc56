"""Meshwright."""
