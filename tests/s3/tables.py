"""Tables as Parquet and Delta Lake, through the S3 clients that data people use.

tables.py GROUP…   URL and AWS credentials come from the environment; the bucket `clients` exists.
"""

import os
import sys

import pyarrow as pa

URL = os.environ["URL"]


def arrow():
    import pyarrow.dataset as ds
    import pyarrow.fs as fs

    files = fs.S3FileSystem(endpoint_override=URL.replace("http://", ""), scheme="http")
    table = pa.table({"a": list(range(200_000)), "k": [row % 7 for row in range(200_000)]})
    ds.write_dataset(table, "clients/arrow", filesystem=files, format="parquet", partitioning=["k"])
    read = ds.dataset("clients/arrow", filesystem=files, partitioning=["k"])
    assert read.to_table(filter=ds.field("a") < 1000).num_rows == 1000


def pandas():
    import pandas as pd
    import s3fs

    options = {"client_kwargs": {"endpoint_url": URL}}
    frame = pd.DataFrame({"x": range(1000)})
    frame.to_parquet("s3://clients/frame.parquet", storage_options=options)
    assert pd.read_parquet("s3://clients/frame.parquet", storage_options=options).equals(frame)
    files = s3fs.S3FileSystem(**options)
    files.pipe("clients/q/a", b"x" * 12_000_000)
    files.mv("clients/q/a", "clients/q/b")
    assert files.size("clients/q/b") == 12_000_000


def delta():
    from deltalake import DeltaTable, write_deltalake

    options = {"AWS_ENDPOINT_URL": URL, "AWS_ALLOW_HTTP": "true", "aws_conditional_put": "etag"}
    for turn in range(3):
        table = pa.table({"a": [turn] * 100})
        write_deltalake("s3://clients/delta", table, mode="append", storage_options=options)
    assert DeltaTable("s3://clients/delta", storage_options=options).to_pyarrow_table().num_rows == 300


for group in sys.argv[1:]:
    globals()[group]()
# After a read of a Delta table, arrow leaves threads that may abort the process at its end.
if "delta" in sys.argv:
    sys.stdout.flush()
    os._exit(0)
