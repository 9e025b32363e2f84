"""Training: state, step, loop."""
