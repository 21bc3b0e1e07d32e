"""A plugin file for ms-swift."""
