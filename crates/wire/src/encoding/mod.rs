//! The encoding of messages (docs/formats/wire.md): compact, and readable by older and newer programs.
//!
//! Every struct has a length before it. A reader skips fields that it does not know, and takes the default of a field that the
//! sender did not know, if the field has one. So a struct may gain fields at its end, and an enum variants at its end.

mod read;
mod write;

#[cfg(test)]
mod tests;

use std::fmt;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Encodes a value.
pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    let mut writer = write::Writer::default();
    value.serialize(&mut writer).expect("messages are plain data");
    writer.out
}

/// Decodes a value that fills `bytes`.
///
/// # Errors
/// If the bytes do not follow the encoding. Nothing is allocated beyond a few times their length.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Malformed> {
    read_all(read::Reader::new(bytes))
}

/// Decodes a value off the front of `bytes`. Returns the rest, too.
///
/// # Errors
/// If the bytes do not follow the encoding.
pub fn decode_front<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8]), Malformed> {
    let mut reader = read::Reader::new(bytes);
    let value = T::deserialize(&mut reader)?;
    Ok((value, &bytes[bytes.len() - reader.left()..]))
}

fn read_all<T: DeserializeOwned>(mut reader: read::Reader<'_>) -> Result<T, Malformed> {
    let value = T::deserialize(&mut reader)?;
    if reader.is_empty() { Ok(value) } else { Err(Malformed("surplus bytes".into())) }
}

/// The code of each operation of a service: names and codes of the variants of its enum of requests, in their order.
#[derive(Debug, Clone, Copy)]
pub struct Operations(pub &'static [(&'static str, u16)]);

impl Operations {
    /// The name of an operation.
    pub fn name(&self, code: u16) -> Option<&'static str> {
        self.0.iter().find(|(_, known)| *known == code).map(|(name, _)| *name)
    }

    /// The code of a request, and the encoding of its fields.
    pub fn encode<T: Serialize>(&self, request: &T) -> (u16, Bytes) {
        let bytes = Bytes::from(encode(request));
        let mut reader = read::Reader::new(&bytes);
        let variant = reader.varint().expect("a request is an enum");
        let fields = bytes.slice(bytes.len() - reader.left()..);
        (self.0[variant as usize].1, fields)
    }

    /// The request of a code and its fields.
    ///
    /// # Errors
    /// If the code is unknown or the bytes do not follow the encoding.
    pub fn decode<T: DeserializeOwned>(&self, code: u16, fields: &[u8]) -> Result<T, BadRequest> {
        let variant = self.0.iter().position(|(_, known)| *known == code).ok_or(BadRequest::Unknown)?;
        read_all(read::Reader::of_variant(variant as u32, fields)).map_err(BadRequest::Malformed)
    }
}

/// Why a request cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// No operation has this code: the sender is newer.
    #[error("unknown operation")]
    Unknown,
    /// Its fields do not follow the encoding.
    #[error(transparent)]
    Malformed(#[from] Malformed),
}

/// Bytes that do not follow the encoding, and the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("malformed message: {0}")]
pub struct Malformed(String);

impl serde::de::Error for Malformed {
    fn custom<T: fmt::Display>(reason: T) -> Self {
        Self(reason.to_string())
    }
}

impl serde::ser::Error for Malformed {
    fn custom<T: fmt::Display>(reason: T) -> Self {
        Self(reason.to_string())
    }
}
