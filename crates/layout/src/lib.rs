//! Pure arithmetic from a file range to extents, stripes, shards and drives.
