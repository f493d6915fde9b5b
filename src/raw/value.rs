//! Values that cross from the caller to a statement and back as they are.

use pgrx::JsonB;
use pgrx::callconv::{Arg, ArgAbi, BoxRet, FcInfo};
use pgrx::datum::Datum;
use pgrx::nullable::Nullable;
use pgrx::prelude::*;
use pgrx::spi::SpiClient;
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

untouched!(Row, "record", RECORDOID, "The row of a procedure's INOUT parameters.");
untouched!(Procedure, "regprocedure", REGPROCEDUREOID, "A `regprocedure`.");
untouched!(UuidArray, "uuid[]", UUIDARRAYOID, "A `uuid[]` that goes into a statement as it came.");
untouched!(Int8Array, "bigint[]", INT8ARRAYOID, "A `bigint[]` that goes into a statement as it came.");
untouched!(TextArray, "text[]", TEXTARRAYOID, "A `text[]` that goes into a statement as it came.");
untouched!(JsonbArray, "jsonb[]", JSONBARRAYOID, "A `jsonb[]` that goes into a statement as it came.");

impl Text {
    /// A text of these bytes, which came from one of this database.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        // A bytea's bytes lie in memory as a text's do.
        bytes.into_datum().map(Self).ok_or(Error::Required("text"))
    }

    /// The length in bytes, without the cost of decompressing a value that may be far too long.
    pub fn octet_length(self) -> usize {
        // SAFETY: the datum is a valid varlena, whose header alone is read. A plain value needs no call of the server.
        unsafe {
            let value = self.0.cast_mut_ptr::<pg_sys::varlena>();
            if pgrx::varlena::varatt_is_4b_u(value) {
                return pgrx::varlena::varsize_any_exhdr(value);
            }
            pg_sys::toast_raw_datum_size(self.0).saturating_sub(pg_sys::VARHDRSZ)
        }
    }

    /// The bytes, in the database's encoding.
    pub fn to_bytes(self) -> Vec<u8> {
        // SAFETY: the datum is a valid varlena; bytes that came from a text make a bytea as good.
        unsafe { Vec::<u8>::from_datum(self.0, false) }.unwrap_or_default()
    }

    /// The text for a message of ours. Bytes beyond ASCII that are no UTF-8 become `?`.
    pub fn to_message(self) -> String {
        String::from_utf8(self.to_bytes()).unwrap_or_else(|error| {
            let ascii = |&byte: &u8| if byte.is_ascii() { char::from(byte) } else { '?' };
            error.as_bytes().iter().map(ascii).collect()
        })
    }
}

/// How the elements of an array lie in memory, as the catalogue says of their type.
struct Layout {
    of_type: pg_sys::Oid,
    length: i16,
    by_value: bool,
    alignment: u8,
}

impl Layout {
    const fn varlena(of_type: pg_sys::Oid) -> Self {
        Self { of_type, length: -1, by_value: false, alignment: b'i' }
    }
}

/// How many elements an array has; `None` for more than one dimension.
///
/// # Safety
/// The datum is an array.
unsafe fn array_len(array: pg_sys::Datum) -> Option<usize> {
    // SAFETY: our caller promises an array, whose header is followed by the lengths of its dimensions.
    unsafe {
        let array = pg_sys::pg_detoast_datum(array.cast_mut_ptr()).cast::<pg_sys::ArrayType>();
        match (*array).ndim {
            0 => Some(0),
            1 => usize::try_from(*array.add(1).cast::<i32>()).ok(),
            _ => None,
        }
    }
}

/// The elements of an array; `None` for NULL.
///
/// # Safety
/// The datum is an array of this type, and this is how its elements lie in memory.
unsafe fn array_elements(array: pg_sys::Datum, layout: &Layout) -> Vec<Option<pg_sys::Datum>> {
    let (mut values, mut nulls, mut count) = (core::ptr::null_mut(), core::ptr::null_mut(), 0);
    // SAFETY: our caller promises the array; the server allocates both lists for as many elements as it says, in the memory
    // of our caller.
    unsafe {
        let array = pg_sys::pg_detoast_datum(array.cast_mut_ptr()).cast::<pg_sys::ArrayType>();
        pg_sys::deconstruct_array(
            array,
            layout.of_type,
            layout.length.into(),
            layout.by_value,
            layout.alignment as core::ffi::c_char,
            &mut values,
            &mut nulls,
            &mut count,
        );
        (0..usize::try_from(count).unwrap_or(0)).map(|at| (!*nulls.add(at)).then(|| *values.add(at))).collect()
    }
}

macro_rules! array {
    ($type:ident, $element:ty, $layout:expr, $of_datum:expr) => {
        impl $type {
            /// The elements; `None` for NULL. They live as long as the call.
            pub fn elements(self) -> Vec<Option<$element>> {
                // SAFETY: an array of the type that the layout is of.
                let elements = unsafe { array_elements(self.0, &$layout) };
                elements.into_iter().map(|element| element.map($of_datum)).collect()
            }
        }
    };
}

array!(JsonbArray, Jsonb, Layout::varlena(pg_sys::JSONBOID), Jsonb);
array!(TextArray, Text, Layout::varlena(pg_sys::TEXTOID), Text);
array!(Int8Array, i64, Layout { of_type: pg_sys::INT8OID, length: 8, by_value: true, alignment: b'd' }, |element| {
    element.value() as i64
});

impl TextArray {
    /// How many elements it has; `None` for more than one dimension.
    pub fn len(self) -> Option<usize> {
        // SAFETY: a text array.
        unsafe { array_len(self.0) }
    }
}

impl Int8Array {
    /// How many elements it has; `None` for more than one dimension.
    pub fn len(self) -> Option<usize> {
        // SAFETY: an array of integers.
        unsafe { array_len(self.0) }
    }
}

impl Jsonb {
    /// The same in the memory of our function's caller, where it outlives the connection to SPI.
    pub fn outliving(self, _connected: &SpiClient<'_>) -> Self {
        // SAFETY: SPI is connected, and the datum is a valid varlena.
        Self(unsafe { pg_sys::SPI_datumTransfer(self.0, false, -1) })
    }

    /// A request or response that Rust describes, as `jsonb`.
    pub fn from_serialize(value: &impl Serialize) -> Result<Self, Error> {
        let value = serde_json::to_value(value).map_err(Error::Json)?;
        JsonB(value).into_datum().map(Self).ok_or(Error::Required("request"))
    }

    /// The object with this one field. As `jsonb_build_object` makes it.
    pub fn of_integer(field: &'static str, value: i64) -> Self {
        use pg_sys::JsonbIteratorToken as Token;
        let mut object = core::ptr::null_mut();
        let mut key = pg_sys::JsonbValue { type_: pg_sys::jbvType::jbvString, ..Default::default() };
        // A static text of ours is far shorter than what the length can say.
        key.val.string.len = field.len() as i32;
        key.val.string.val = field.as_ptr().cast_mut().cast();
        let mut number = pg_sys::JsonbValue { type_: pg_sys::jbvType::jbvNumeric, ..Default::default() };
        // SAFETY: the server builds the object in the memory of our caller, and reads the key without changing it.
        unsafe {
            number.val.numeric = pg_sys::int64_to_numeric(value);
            pg_sys::pushJsonbValue(&mut object, Token::WJB_BEGIN_OBJECT, core::ptr::null_mut());
            pg_sys::pushJsonbValue(&mut object, Token::WJB_KEY, &mut key);
            pg_sys::pushJsonbValue(&mut object, Token::WJB_VALUE, &mut number);
            let built = pg_sys::pushJsonbValue(&mut object, Token::WJB_END_OBJECT, core::ptr::null_mut());
            Self(pg_sys::Datum::from(pg_sys::JsonbValueToJsonb(built)))
        }
    }

    /// The value as JSON text in UTF-8, whatever the database's encoding.
    pub fn to_utf8(self) -> Vec<u8> {
        // SAFETY: jsonb_out takes a jsonb and returns a C string in the database's encoding, and pg_server_to_any returns
        // the very pointer if there is nothing to convert. Both stay in the memory of our caller, which is reset.
        unsafe {
            let text: Option<&core::ffi::CStr> = pgrx::direct_function_call(pg_sys::jsonb_out, &[Some(self.0)]);
            let Some(text) = text else { return Vec::new() };
            let length = i32::try_from(text.count_bytes()).unwrap_or(i32::MAX);
            let converted = pg_sys::pg_server_to_any(text.as_ptr(), length, pg_sys::pg_enc::PG_UTF8 as _);
            core::ffi::CStr::from_ptr(converted).to_bytes().to_vec()
        }
    }
}
