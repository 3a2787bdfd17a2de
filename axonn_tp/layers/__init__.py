"""3D parallel matrix multiplication (`product`), and the layers that use it or follow from it."""
