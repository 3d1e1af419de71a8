"""What leaves PyTorch: one operating point as a file, and bundles that stay adaptive. Needs the extra `onnx` or `openvino`."""
