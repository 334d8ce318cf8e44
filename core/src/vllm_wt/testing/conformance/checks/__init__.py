"""The checks, a file for each part of docs/contract.md. Each names its clauses in its docstring."""
