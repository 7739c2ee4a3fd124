//! Reads values.

use serde::de::value::U32Deserializer;
use serde::de::{self, DeserializeSeed, Deserializer, Error, IntoDeserializer, Visitor};

use super::Malformed;

/// Takes encoded values off the front of bytes.
pub(super) struct Reader<'de> {
    rest: &'de [u8],
    /// The variant of the enum that comes first, if it does not stand in the bytes.
    variant: Option<u32>,
}

impl<'de> Reader<'de> {
    pub(super) fn new(bytes: &'de [u8]) -> Self {
        Self { rest: bytes, variant: None }
    }

    /// Reads an enum of which the variant is known.
    pub(super) fn of_variant(variant: u32, fields: &'de [u8]) -> Self {
        Self { rest: fields, variant: Some(variant) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(super) fn left(&self) -> usize {
        self.rest.len()
    }

    fn take(&mut self, len: usize) -> Result<&'de [u8], Malformed> {
        let (head, rest) =
            self.rest.split_at_checked(len).ok_or_else(|| Malformed("it ends early".into()))?;
        self.rest = rest;
        Ok(head)
    }

    fn byte(&mut self) -> Result<u8, Malformed> {
        Ok(self.take(1)?[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        Ok(self.take(N)?.try_into().expect("the length was just checked"))
    }

    pub(super) fn varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Malformed("a number is too large".into()))
    }

    fn number<T: TryFrom<u64>>(&mut self) -> Result<T, Malformed> {
        T::try_from(self.varint()?).map_err(|_| Malformed("a number is too large".into()))
    }

    fn signed<T: TryFrom<i64>>(&mut self) -> Result<T, Malformed> {
        let raw = self.varint()?;
        let value = (raw >> 1) as i64 ^ -((raw & 1) as i64);
        T::try_from(value).map_err(|_| Malformed("a number is too large".into()))
    }

    fn blob(&mut self) -> Result<&'de [u8], Malformed> {
        let len = self.number()?;
        self.take(len)
    }

    fn flag(&mut self) -> Result<bool, Malformed> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("a flag is neither 0 nor 1".into())),
        }
    }

    /// A count of items, of which each takes at least one byte.
    fn count(&mut self) -> Result<usize, Malformed> {
        let count = self.number()?;
        if count > self.rest.len() {
            return Err(Malformed("a count is larger than the message".into()));
        }
        Ok(count)
    }

    fn fields<V: Visitor<'de>>(&mut self, visitor: V) -> Result<V::Value, Malformed> {
        let fields = self.blob()?;
        visitor.visit_seq(Fields(Reader::new(fields)))
    }
}

/// Fields of a struct, as many as the sender knew.
struct Fields<'de>(Reader<'de>);

impl<'de> de::SeqAccess<'de> for Fields<'de> {
    type Error = Malformed;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Malformed> {
        if self.0.is_empty() {
            return Ok(None);
        }
        seed.deserialize(&mut self.0).map(Some)
    }
}

struct Items<'a, 'de> {
    reader: &'a mut Reader<'de>,
    left: usize,
}

impl<'de> de::SeqAccess<'de> for Items<'_, 'de> {
    type Error = Malformed;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Malformed> {
        let Some(left) = self.left.checked_sub(1) else { return Ok(None) };
        self.left = left;
        seed.deserialize(&mut *self.reader).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        Some(self.left)
    }
}

impl<'de> de::MapAccess<'de> for Items<'_, 'de> {
    type Error = Malformed;

    fn next_key_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Malformed> {
        de::SeqAccess::next_element_seed(self, seed)
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, Malformed> {
        seed.deserialize(&mut *self.reader)
    }
}

struct Variant<'a, 'de>(&'a mut Reader<'de>);

impl<'a, 'de> de::EnumAccess<'de> for Variant<'a, 'de> {
    type Error = Malformed;
    type Variant = Self;

    fn variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<(T::Value, Self), Malformed> {
        let index = match self.0.variant.take() {
            Some(index) => index,
            None => self.0.number()?,
        };
        let index: U32Deserializer<Malformed> = index.into_deserializer();
        Ok((seed.deserialize(index)?, self))
    }
}

impl<'de> de::VariantAccess<'de> for Variant<'_, 'de> {
    type Error = Malformed;

    fn unit_variant(self) -> Result<(), Malformed> {
        Ok(())
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Malformed> {
        seed.deserialize(self.0)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Malformed> {
        self.0.fields(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Malformed> {
        self.0.fields(visitor)
    }
}

macro_rules! numbers {
    ($($method:ident $visit:ident $read:ident),*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
            visitor.$visit(self.$read()?)
        }
    )*};
}

impl<'de> Deserializer<'de> for &mut Reader<'de> {
    type Error = Malformed;

    numbers!(
        deserialize_bool visit_bool flag,
        deserialize_u8 visit_u8 byte,
        deserialize_u16 visit_u16 number,
        deserialize_u32 visit_u32 number,
        deserialize_u64 visit_u64 varint,
        deserialize_i8 visit_i8 signed,
        deserialize_i16 visit_i16 signed,
        deserialize_i32 visit_i32 signed,
        deserialize_i64 visit_i64 signed,
        deserialize_bytes visit_borrowed_bytes blob,
        deserialize_byte_buf visit_borrowed_bytes blob
    );

    fn is_human_readable(&self) -> bool {
        false
    }

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Malformed> {
        Err(Malformed::custom("the encoding does not tell types"))
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        visitor.visit_f32(f32::from_le_bytes(self.array()?))
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        visitor.visit_f64(f64::from_le_bytes(self.array()?))
    }

    fn deserialize_char<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        let char = char::from_u32(self.number()?).ok_or_else(|| Malformed::custom("no character"))?;
        visitor.visit_char(char)
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        visitor.visit_borrowed_str(std::str::from_utf8(self.blob()?).map_err(Malformed::custom)?)
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        if self.flag()? { visitor.visit_some(self) } else { visitor.visit_none() }
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        visitor.visit_unit()
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Malformed> {
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Malformed> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        let left = self.count()?;
        visitor.visit_seq(Items { reader: self, left })
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, len: usize, visitor: V) -> Result<V::Value, Malformed> {
        visitor.visit_seq(Items { reader: self, left: len })
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: usize,
        visitor: V,
    ) -> Result<V::Value, Malformed> {
        self.fields(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Malformed> {
        let left = self.count()?;
        visitor.visit_map(Items { reader: self, left })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Malformed> {
        self.fields(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Malformed> {
        visitor.visit_enum(Variant(self))
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Malformed> {
        Err(Malformed::custom("the encoding has no names"))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Malformed> {
        Err(Malformed::custom("the encoding does not tell types"))
    }
}
