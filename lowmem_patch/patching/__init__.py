"""Trace a model, plan what may be kept less of, and carry the plan out on that one object."""
