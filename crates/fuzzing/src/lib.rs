//! Generators and oracles shared by tests and fuzz targets.

#![forbid(unsafe_code)]
