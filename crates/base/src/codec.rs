//! Little-endian reading and writing of the byte formats in `docs/formats`.
//!
//! Decoding never panics and never allocates more than the input holds.

/// The bytes do not follow the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed bytes: field={field}")]
pub struct DecodeError {
    /// The field that could not be read.
    pub field: &'static str,
}

/// Takes fields off the front of a byte slice.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

macro_rules! read_int {
    ($($name:ident: $int:ty),*) => {$(
        /// Takes one little-endian integer.
        pub fn $name(&mut self, field: &'static str) -> Result<$int, DecodeError> {
            let bytes = self.bytes(size_of::<$int>(), field)?;
            Ok(<$int>::from_le_bytes(bytes.try_into().expect("length was just checked")))
        }
    )*};
}

impl<'a> Reader<'a> {
    /// Starts at the front of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    read_int!(u8: u8, u16: u16, u32: u32, u64: u64, i64: i64);

    /// Takes `len` bytes.
    pub fn bytes(&mut self, len: usize, field: &'static str) -> Result<&'a [u8], DecodeError> {
        let (head, rest) = self.rest.split_at_checked(len).ok_or(DecodeError { field })?;
        self.rest = rest;
        Ok(head)
    }

    /// Takes a `u32` length and as many bytes.
    pub fn blob(&mut self, field: &'static str) -> Result<&'a [u8], DecodeError> {
        let len = self.u32(field)?;
        self.bytes(len as usize, field)
    }

    /// The bytes not taken yet.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Succeeds if every byte was taken.
    pub fn finish(self, field: &'static str) -> Result<(), DecodeError> {
        if self.rest.is_empty() { Ok(()) } else { Err(DecodeError { field }) }
    }
}

/// Appends fields to a byte vector.
#[derive(Debug, Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

macro_rules! write_int {
    ($($name:ident: $int:ty),*) => {$(
        /// Appends one little-endian integer.
        pub fn $name(&mut self, value: $int) -> &mut Self {
            self.bytes.extend_from_slice(&value.to_le_bytes());
            self
        }
    )*};
}

impl Writer {
    /// An empty writer.
    pub fn new() -> Self {
        Self::default()
    }

    write_int!(u8: u8, u16: u16, u32: u32, u64: u64, i64: i64);

    /// Appends raw bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Appends a `u32` length and the bytes.
    pub fn blob(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(u32::try_from(bytes.len()).expect("every blob in a format is below 4 GiB"));
        self.bytes(bytes)
    }

    /// Bytes written so far.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether nothing was written yet.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The bytes written.
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_back_in_order() {
        let mut writer = Writer::new();
        writer.u8(1).u16(2).u32(3).u64(4).i64(-5).blob(b"six");
        let bytes = writer.finish();
        let mut reader = Reader::new(&bytes);
        assert_eq!(reader.u8("a"), Ok(1));
        assert_eq!(reader.u16("b"), Ok(2));
        assert_eq!(reader.u32("c"), Ok(3));
        assert_eq!(reader.u64("d"), Ok(4));
        assert_eq!(reader.i64("e"), Ok(-5));
        assert_eq!(reader.blob("f"), Ok(&b"six"[..]));
        assert_eq!(reader.u8("g"), Err(DecodeError { field: "g" }));
        assert_eq!(reader.finish("end"), Ok(()));
    }

    #[test]
    fn a_length_beyond_the_input_is_refused() {
        assert!(Reader::new(&[255, 255, 255, 255, 0]).blob("x").is_err());
    }
}
