//! Whose rights a piece of work has, and transactions that end and begin within a call.

use std::cell::Cell;

use pgrx::prelude::*;

use super::Row;
use crate::error::Error;

thread_local! {
    static ACTING: Cell<bool> = const { Cell::new(false) };
}

/// Whether the session acts with the rights of another role.
pub fn is_acting() -> bool {
    ACTING.get()
}

/// While it lives, the session acts with the rights of another role, and nothing that runs can change that or leave
/// anything behind that would run later.
pub struct ActingAs {
    role: pg_sys::Oid,
    context: i32,
}

impl ActingAs {
    /// Begins to act as this role, as the server does when it checks foreign keys or vacuums a table.
    pub fn begin(role: pg_sys::Oid) -> Self {
        let mut before = Self { role: pg_sys::InvalidOid, context: 0 };
        let restricted = (pg_sys::SECURITY_LOCAL_USERID_CHANGE | pg_sys::SECURITY_RESTRICTED_OPERATION) as i32;
        // SAFETY: the pair of calls that the server uses for this. What is set here is undone by `drop`, also on errors,
        // which pgrx turns into unwinding; and the server itself sets it back at the end of an aborted (sub)transaction.
        unsafe {
            pg_sys::GetUserIdAndSecContext(&mut before.role, &mut before.context);
            pg_sys::SetUserIdAndSecContext(role, before.context | restricted);
        }
        ACTING.set(true);
        before
    }
}

impl Drop for ActingAs {
    fn drop(&mut self) {
        ACTING.set(false);
        // SAFETY: as in `begin`.
        unsafe { pg_sys::SetUserIdAndSecContext(self.role, self.context) };
    }
}

/// How a procedure was called.
pub struct Call {
    frame: pg_sys::FunctionCallInfo,
    atomic: bool,
}

impl Call {
    /// The call in progress, of whose frame the server tells our function.
    pub fn of(frame: pg_sys::FunctionCallInfo) -> Self {
        // SAFETY: nobody but the server makes a frame. CALL says in its context whether the procedure may end the
        // transaction; a function's frame has no such context.
        let atomic = unsafe {
            let context = (*frame).context.cast::<pg_sys::CallContext>();
            context.is_null() || (*context).type_ != pg_sys::NodeTag::T_CallContext || (*context).atomic
        };
        Self { frame, atomic }
    }

    /// Whether the procedure may not end the transaction.
    pub fn is_atomic(&self) -> bool {
        self.atomic
    }

    /// Commits what the procedure has done so far, and begins the next transaction.
    ///
    /// # Errors
    /// The server's 2D000 where the procedure was called within a subtransaction.
    pub fn commit(&self) -> Result<(), Error> {
        // SAFETY: SPI is connected for this alone and finished at once, so that nothing of it outlives the transaction. Values
        // that our caller holds are Rust's own. An error leaves SPI to the server's clean-up.
        unsafe {
            let options = if self.atomic { 0 } else { pg_sys::SPI_OPT_NONATOMIC };
            let connected = pg_sys::SPI_connect_ext(options as i32);
            if connected != pg_sys::SPI_OK_CONNECT as i32 {
                return Err(Error::Spi(connected));
            }
            pg_sys::SPI_commit();
            match pg_sys::SPI_finish() {
                code if code == pg_sys::SPI_OK_FINISH as i32 => Ok(()),
                code => Err(Error::Spi(code)),
            }
        }
    }

    /// The row of the procedure's INOUT parameters.
    pub fn row<const COLUMNS: usize>(&self, values: [Option<pg_sys::Datum>; COLUMNS]) -> Result<Row, Error> {
        let mut datums = values.map(|value| value.unwrap_or(pg_sys::Datum::null()));
        let mut nulls = values.map(|value| value.is_none());
        // SAFETY: the server describes the row that the call has to return; with as many columns as values it is formed from
        // them, in the memory of the function's caller.
        unsafe {
            let mut description: pg_sys::TupleDesc = core::ptr::null_mut();
            let class = pg_sys::get_call_result_type(self.frame, core::ptr::null_mut(), &mut description);
            if class != pg_sys::TypeFuncClass::TYPEFUNC_COMPOSITE || (*description).natts as usize != COLUMNS {
                return Err(Error::Spi(pg_sys::SPI_ERROR_ARGUMENT));
            }
            let description = pg_sys::BlessTupleDesc(description);
            let tuple = pg_sys::heap_form_tuple(description, datums.as_mut_ptr(), nulls.as_mut_ptr());
            Ok(Row(pg_sys::HeapTupleHeaderGetDatum((*tuple).t_data)))
        }
    }
}
