//! Values that cross from the caller to a statement and back as they are.

use pgrx::JsonB;
use pgrx::callconv::{Arg, ArgAbi, BoxRet, FcInfo};
use pgrx::datum::Datum;
use pgrx::nullable::Nullable;
use pgrx::prelude::*;
use serde::Serialize;

use crate::error::Error;

macro_rules! untouched {
    ($type:ident, $sql:literal, $oid:ident, $doc:literal) => {
        #[doc = $doc]
        #[derive(Clone, Copy, Debug)]
        pub struct $type(pub(super) pg_sys::Datum);

        impl FromDatum for $type {
            unsafe fn from_polymorphic_datum(datum: pg_sys::Datum, is_null: bool, _: pg_sys::Oid) -> Option<Self> {
                (!is_null).then_some(Self(datum))
            }
        }

        impl IntoDatum for $type {
            fn into_datum(self) -> Option<pg_sys::Datum> {
                Some(self.0)
            }

            fn type_oid() -> pg_sys::Oid {
                pg_sys::$oid
            }
        }

        // SAFETY: the SQL type declared below is the one that the datum was taken from, and NULL becomes
        // `Nullable::Null`; the datum lives as long as the call, and no longer is it used.
        unsafe impl<'fcx> ArgAbi<'fcx> for $type {
            unsafe fn unbox_arg_unchecked(arg: Arg<'_, 'fcx>) -> Self {
                // SAFETY: our caller promises an argument that is not NULL; a NULL one would become a null pointer.
                unsafe { arg.unbox_arg_using_from_datum() }.unwrap_or(Self(pg_sys::Datum::null()))
            }

            unsafe fn unbox_nullable_arg(arg: Arg<'_, 'fcx>) -> Nullable<Self> {
                // SAFETY: our caller promises an argument of the declared type.
                unsafe { arg.unbox_arg_using_from_datum() }.into()
            }
        }

        // SAFETY: the datum is of the declared SQL type and was allocated in the caller's memory context.
        unsafe impl BoxRet for $type {
            unsafe fn box_into<'fcx>(self, fcinfo: &mut FcInfo<'fcx>) -> Datum<'fcx> {
                // SAFETY: as above.
                unsafe { fcinfo.return_raw_datum(self.0) }
            }
        }

        pgrx::impl_sql_translatable!($type, $sql);
    };
}

untouched!(
    Text,
    "text",
    TEXTOID,
    "A `text` that goes from the caller into a statement as it came, in whatever encoding."
);
untouched!(
    Jsonb,
    "jsonb",
    JSONBOID,
    "A `jsonb` that goes from a statement to the caller as it is, without a way through text."
);

impl Text {
    /// The length in bytes, without the cost of decompressing a value that may be far too long.
    pub fn octet_length(self) -> usize {
        // SAFETY: the datum is a valid varlena, whose header alone is read.
        let with_header = unsafe { pg_sys::toast_raw_datum_size(self.0) };
        with_header.saturating_sub(pg_sys::VARHDRSZ)
    }
}

impl Jsonb {
    /// A request or response that Rust describes, as `jsonb`.
    pub fn from_serialize(value: &impl Serialize) -> Result<Self, Error> {
        let value = serde_json::to_value(value).map_err(Error::Encode)?;
        JsonB(value).into_datum().map(Self).ok_or(Error::ForeignTable)
    }
}
