"""Graphs and plans for people: text for terminals, Mermaid for documents, SVG for notebooks."""
