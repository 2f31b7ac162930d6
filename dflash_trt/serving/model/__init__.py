"""What runs inside Triton: from request tensors to response tensors, and rounds."""
