"""Step tables for the derivative of any activation: the search, which needs scipy."""

from lowmem_patch.tables.fit import fit_step_table as fit_step_table
