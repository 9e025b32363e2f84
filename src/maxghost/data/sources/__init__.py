"""Where documents come from: one module per `dataset_type`."""
