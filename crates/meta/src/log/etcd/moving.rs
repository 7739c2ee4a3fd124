//! Logs that come to etcd from another engine. The move is an attempt with a number: a later try of the same attempt replaces what an
//! earlier one has left, until an owner has sealed a log here.

use base::{Epoch, LedgerId, Seq};
use bytes::Bytes;

use super::Etcd;
use super::proto::{Compare, KeyValue, RequestOp, TxnRequest};
use super::values::{Common, Keys, decode_moved, decode_owner, encode_moved, encode_owner, encode_tail};
use crate::log::remote::LONG;
use crate::log::{LogError, NOBODY, Sealed};

impl Etcd {
    /// See [`LogEngine::claim`].
    pub(super) async fn claim_place(
        &self,
        number: u64,
        (first, epoch): (LedgerId, Epoch),
    ) -> Result<bool, LogError> {
        let common = Common::new(&self.prefix);
        let (moved, owner) = (common.moved(), Keys::new(&self.prefix, first).owner());
        let (start, end) = common.all();
        self.change(TxnRequest {
            compare: vec![Compare::none(start, end)],
            success: vec![RequestOp::put(moved.clone(), encode_moved(number))],
            failure: vec![],
        })
        .await?;
        let look = vec![RequestOp::get(owner.clone())];
        let (_, found) = self.change(TxnRequest { success: look, ..TxnRequest::default() }).await?;
        let known = found.first();
        if let Some(owner) = known
            && (owner.version > 1 || decode_owner(&owner.value)?.epoch > epoch)
        {
            return Ok(false);
        }
        let (start, end) = common.ledgers();
        let is_ours = Compare::value(moved, encode_moved(number));
        let is_vacant = Compare::mod_revision(owner, known.map_or(0, |owner| owner.mod_revision));
        let success = vec![RequestOp::delete(start, end)];
        Ok(self.change(TxnRequest { compare: vec![is_ours, is_vacant], success, failure: vec![] }).await?.0)
    }

    /// See [`LogEngine::is_free`].
    pub(super) async fn is_place_free(&self, number: u64) -> Result<bool, LogError> {
        let common = Common::new(&self.prefix);
        let (start, end) = common.all();
        // A read of the newest state needs the majority.
        let look = TxnRequest {
            compare: vec![Compare::none(start, end)],
            success: vec![],
            failure: vec![RequestOp::get(common.moved())],
        };
        let (is_empty, found) = self.change(look).await?;
        Ok(is_empty || found.iter().any(|moved| moved.value == encode_moved(number)))
    }

    /// See [`LogEngine::number`].
    pub(super) async fn number_of_move(&self) -> Result<u64, LogError> {
        let look = vec![RequestOp::get(Common::new(&self.prefix).moved())];
        let (_, found) = self.change(TxnRequest { success: look, ..TxnRequest::default() }).await?;
        found.first().map_or(Ok(0), |moved| decode_moved(&moved.value))
    }

    /// See [`LogEngine::begin`].
    pub(super) async fn begin_log(
        &self,
        number: u64,
        ledger: LedgerId,
        (epoch, end): (Epoch, Seq),
    ) -> Result<bool, LogError> {
        let keys = Keys::new(&self.prefix, ledger);
        let owner = encode_owner(Sealed { epoch, nonce: NOBODY });
        let tail = encode_tail(end);
        let moved = Common::new(&self.prefix).moved();
        let is_ours = Compare::value(moved, encode_moved(number));
        let begin = TxnRequest {
            compare: vec![is_ours, Compare::mod_revision(keys.owner(), 0)],
            success: vec![
                RequestOp::put(keys.owner(), owner.clone()),
                RequestOp::put(keys.tail(), tail.clone()),
            ],
            failure: vec![RequestOp::get(keys.owner()), RequestOp::get(keys.tail())],
        };
        let (begun, found) = self.change(begin).await?;
        // The answer to an earlier request may have been lost.
        let is_there = |key: Bytes, value| found.iter().any(|kv| kv.key == key && kv.value == value);
        Ok(begun || (is_there(keys.owner(), owner) && is_there(keys.tail(), tail)))
    }

    /// Whether its conditions held, and what it found.
    async fn change(&self, request: TxnRequest) -> Result<(bool, Vec<KeyValue>), LogError> {
        let client = self.client.clone();
        let answer = self.client.run(async move { client.repeat(request, LONG).await }).await??;
        Ok((answer.succeeded, answer.into_ranges().flatten().collect()))
    }
}
