"""Co-design of networks and accelerators: layers, what they cost on an accelerator, and when they run."""
