"""Documents, and what keeps them true."""
