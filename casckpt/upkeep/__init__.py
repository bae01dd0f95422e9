"""Looking after a store: gc, copies, checking and repair. Beside checkpoint/, and without tensors."""
