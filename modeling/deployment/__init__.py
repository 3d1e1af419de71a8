"""
Where a checkpoint is put to use: predictions for whole data sets, one operating point as a file, and bundles that stay
adaptive. The latter two need the extra `onnx` or `openvino`.
"""
