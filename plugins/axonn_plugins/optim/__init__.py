"""Optimizer state in tiles: flat stores of parameters' elements, reduced by buckets, lent to any element-wise torch optimizer.

It knows no host and no system; `samo.Optimizer`, `ted_moe.TiledOptimizer` and the pipeline's `BucketedOptimizer` stand on it.
"""
