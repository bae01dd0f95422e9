"""The edge to torch: state taken apart and put together, tensors as regions, memory for bytes on their way."""
