//! Writes values.

use serde::Serialize;
use serde::ser::{self, Serializer};

use super::Malformed;

/// Appends encoded values.
#[derive(Default)]
pub(super) struct Writer {
    pub(super) out: Vec<u8>,
}

impl Writer {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.out.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.out.push(value as u8);
    }

    fn signed(&mut self, value: i64) {
        self.varint(((value << 1) ^ (value >> 63)) as u64);
    }

    fn blob(&mut self, bytes: &[u8]) {
        self.varint(bytes.len() as u64);
        self.out.extend_from_slice(bytes);
    }

    /// Begins a struct: its length will stand before what is written from here on.
    fn fields(&mut self) -> Fields<'_> {
        self.out.push(0);
        Fields { start: self.out.len(), writer: self, has_gap: false }
    }

    fn items(&mut self, count: Option<usize>) -> Result<Items<'_>, Malformed> {
        let count = count.ok_or_else(|| ser::Error::custom("a sequence of unknown length"))?;
        self.varint(count as u64);
        Ok(Items(self))
    }
}

/// Writes the fields of a struct.
pub(super) struct Fields<'a> {
    writer: &'a mut Writer,
    start: usize,
    /// A field was left out: a reader would take the next one for it.
    has_gap: bool,
}

impl Fields<'_> {
    fn field<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Malformed> {
        if self.has_gap {
            return Err(ser::Error::custom("a field after one that was left out"));
        }
        value.serialize(&mut *self.writer)
    }

    fn close(self) -> Result<(), Malformed> {
        let out = &mut self.writer.out;
        let len = out.len() - self.start;
        if len < 0x80 {
            out[self.start - 1] = len as u8;
            return Ok(());
        }
        // A longer length takes more than the byte that was left for it.
        let mut prefix = Writer::default();
        prefix.varint(len as u64);
        out.splice(self.start - 1..self.start, prefix.out);
        Ok(())
    }
}

/// Writes items that need no length: those of tuples, and of sequences after their count.
pub(super) struct Items<'a>(&'a mut Writer);

impl<'a> Serializer for &'a mut Writer {
    type Ok = ();
    type Error = Malformed;
    type SerializeSeq = Items<'a>;
    type SerializeTuple = Items<'a>;
    type SerializeTupleStruct = Fields<'a>;
    type SerializeTupleVariant = Fields<'a>;
    type SerializeMap = Items<'a>;
    type SerializeStruct = Fields<'a>;
    type SerializeStructVariant = Fields<'a>;

    fn is_human_readable(&self) -> bool {
        false
    }

    fn serialize_bool(self, value: bool) -> Result<(), Malformed> {
        self.out.push(value.into());
        Ok(())
    }

    fn serialize_u8(self, value: u8) -> Result<(), Malformed> {
        self.out.push(value);
        Ok(())
    }

    fn serialize_u16(self, value: u16) -> Result<(), Malformed> {
        self.serialize_u64(value.into())
    }

    fn serialize_u32(self, value: u32) -> Result<(), Malformed> {
        self.serialize_u64(value.into())
    }

    fn serialize_u64(self, value: u64) -> Result<(), Malformed> {
        self.varint(value);
        Ok(())
    }

    fn serialize_i8(self, value: i8) -> Result<(), Malformed> {
        self.serialize_i64(value.into())
    }

    fn serialize_i16(self, value: i16) -> Result<(), Malformed> {
        self.serialize_i64(value.into())
    }

    fn serialize_i32(self, value: i32) -> Result<(), Malformed> {
        self.serialize_i64(value.into())
    }

    fn serialize_i64(self, value: i64) -> Result<(), Malformed> {
        self.signed(value);
        Ok(())
    }

    fn serialize_f32(self, value: f32) -> Result<(), Malformed> {
        self.out.extend_from_slice(&value.to_le_bytes());
        Ok(())
    }

    fn serialize_f64(self, value: f64) -> Result<(), Malformed> {
        self.out.extend_from_slice(&value.to_le_bytes());
        Ok(())
    }

    fn serialize_char(self, value: char) -> Result<(), Malformed> {
        self.serialize_u32(value.into())
    }

    fn serialize_str(self, value: &str) -> Result<(), Malformed> {
        self.serialize_bytes(value.as_bytes())
    }

    fn serialize_bytes(self, value: &[u8]) -> Result<(), Malformed> {
        self.blob(value);
        Ok(())
    }

    fn serialize_none(self) -> Result<(), Malformed> {
        self.serialize_bool(false)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Malformed> {
        self.out.push(1);
        value.serialize(self)
    }

    /// Takes no bytes, so it must not be a field of a struct: a reader would take it for a field that the sender did not know.
    fn serialize_unit(self) -> Result<(), Malformed> {
        Ok(())
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<(), Malformed> {
        Ok(())
    }

    fn serialize_unit_variant(self, _: &'static str, index: u32, _: &'static str) -> Result<(), Malformed> {
        self.serialize_u32(index)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<(), Malformed> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        index: u32,
        _: &'static str,
        value: &T,
    ) -> Result<(), Malformed> {
        self.varint(index.into());
        value.serialize(self)
    }

    fn serialize_seq(self, len: Option<usize>) -> Result<Items<'a>, Malformed> {
        self.items(len)
    }

    fn serialize_tuple(self, _: usize) -> Result<Items<'a>, Malformed> {
        Ok(Items(self))
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Fields<'a>, Malformed> {
        Ok(self.fields())
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        index: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Fields<'a>, Malformed> {
        self.varint(index.into());
        Ok(self.fields())
    }

    fn serialize_map(self, len: Option<usize>) -> Result<Items<'a>, Malformed> {
        self.items(len)
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Fields<'a>, Malformed> {
        Ok(self.fields())
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        index: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Fields<'a>, Malformed> {
        self.varint(index.into());
        Ok(self.fields())
    }
}

impl ser::SerializeSeq for Items<'_> {
    type Ok = ();
    type Error = Malformed;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Malformed> {
        value.serialize(&mut *self.0)
    }

    fn end(self) -> Result<(), Malformed> {
        Ok(())
    }
}

impl ser::SerializeTuple for Items<'_> {
    type Ok = ();
    type Error = Malformed;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Malformed> {
        value.serialize(&mut *self.0)
    }

    fn end(self) -> Result<(), Malformed> {
        Ok(())
    }
}

impl ser::SerializeMap for Items<'_> {
    type Ok = ();
    type Error = Malformed;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Malformed> {
        key.serialize(&mut *self.0)
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Malformed> {
        value.serialize(&mut *self.0)
    }

    fn end(self) -> Result<(), Malformed> {
        Ok(())
    }
}

macro_rules! fields {
    ($($trait:ident $method:ident ($($key:ident)?)),*) => {$(
        impl ser::$trait for Fields<'_> {
            type Ok = ();
            type Error = Malformed;

            fn $method<T: Serialize + ?Sized>(&mut self, $($key: &'static str,)? value: &T) -> Result<(), Malformed> {
                self.field(value)
            }

            $(
                fn skip_field(&mut self, $key: &'static str) -> Result<(), Malformed> {
                    self.has_gap = true;
                    Ok(())
                }
            )?

            fn end(self) -> Result<(), Malformed> {
                self.close()
            }
        }
    )*};
}

fields!(
    SerializeTupleStruct serialize_field (),
    SerializeTupleVariant serialize_field (),
    SerializeStruct serialize_field (_key),
    SerializeStructVariant serialize_field (_key)
);
