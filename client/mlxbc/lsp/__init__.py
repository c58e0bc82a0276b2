"""Owns `mlxbc lsp`: inline completion for any editor that speaks the Language Server Protocol 3.18."""
