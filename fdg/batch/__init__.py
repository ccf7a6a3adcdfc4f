"""Following the batch axis: what each operation does with it, and what devices have to exchange."""
