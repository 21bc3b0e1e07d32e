"""Facts of one forward: what each op does, who makes and who reads each tensor, what autograd saves.

This file imports nothing: the ops at runtime read `op_roles` and `row_moves`, and need no trace.
"""
