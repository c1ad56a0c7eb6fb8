from netcl.core.memory import get_persistent_pool
pool = get_persistent_pool(queue)
print(pool.get_stats()) # {hits, misses, hit_rate, bytes_allocated, bytes_cached, buckets}
