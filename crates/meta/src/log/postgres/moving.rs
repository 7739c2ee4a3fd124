//! Logs that come to PostgreSQL from another engine. The move is an attempt with a number: a later try of the same attempt replaces what an
//! earlier one has left, until an owner has sealed a log here.

use base::{Epoch, LedgerId, Seq};
use tokio_postgres::types::Type;

use super::super::remote::{LONG, SHORT};
use super::super::{LogError, NOBODY, Sealed};
use super::session::Parameter;
use super::statements::{self, Found};
use super::{Postgres, id, position};

/// How often a claim is tried whose place another statement has touched.
const CLAIMS: u32 = 3;

/// Notes the attempt $3, unless another was noted, or ledger $2 had an owner or was begun with a higher epoch than $4.
///
/// All that owners do begins with a seal of that ledger, whose row is written first here: one waits for the other.
const CLAIM: &str = "
WITH first AS (
    UPDATE forebay_logs SET looks = looks + 1, held = (seals = 0 AND epoch <= $4) WHERE prefix = $1 AND ledger = $2
    RETURNING held, looks
)
INSERT INTO forebay_moves AS m (prefix, number)
SELECT $1, $3 FROM first
WHERE first.held AND (
    EXISTS (SELECT FROM forebay_moves WHERE prefix = $1 AND number = $3)
    OR NOT EXISTS (SELECT FROM forebay_logs WHERE prefix = $1 AND (epoch <> 0 OR seals <> 0))
)
ON CONFLICT (prefix) DO UPDATE SET number = m.number
RETURNING number, (SELECT looks FROM first) AS looks";

/// Removes what an earlier try of the attempt $3 has left, if ledger $2 still has had no owner, and no other statement wrote its row
/// after the one that counted $4: a statement that was sent twice may be executed late.
const CLEAR: &str = "
WITH first AS (
    UPDATE forebay_logs SET looks = looks + 1, epoch = CASE WHEN seals = 0 AND looks = $4 THEN 0 ELSE epoch END,
        nonce = CASE WHEN seals = 0 AND looks = $4 THEN 0 ELSE nonce END,
        tail = CASE WHEN seals = 0 AND looks = $4 THEN 0 ELSE tail END,
        first = CASE WHEN seals = 0 AND looks = $4 THEN 1 ELSE first END, held = (seals = 0 AND looks = $4)
    WHERE prefix = $1 AND ledger = $2 AND EXISTS (SELECT FROM forebay_moves WHERE prefix = $1 AND number = $3)
    RETURNING held
), others AS (
    UPDATE forebay_logs AS l SET epoch = 0, nonce = 0, tail = 0, first = 1 FROM first
    WHERE first.held AND l.prefix = $1 AND l.ledger <> $2
)
SELECT held FROM first WHERE held";

const IS_FREE: &str = "
SELECT NOT EXISTS (SELECT FROM forebay_logs WHERE prefix = $1 AND (epoch <> 0 OR seals <> 0))
    AND NOT EXISTS (SELECT FROM forebay_moves WHERE prefix = $1 AND number <> $2)
    OR EXISTS (SELECT FROM forebay_moves WHERE prefix = $1 AND number = $2) AS is_free";

const NUMBER: &str = "SELECT format, number FROM forebay_moves WHERE prefix = $1";

impl Postgres {
    /// See [`super::super::LogEngine::claim`].
    pub(super) async fn claim_place(
        &self,
        number: u64,
        (first, epoch): (LedgerId, Epoch),
    ) -> Result<bool, LogError> {
        self.make_log(first).await?;
        let (first, number, epoch) = (id(first), number.cast_signed(), epoch.0.cast_signed());
        for _ in 0..CLAIMS {
            let claimed = self.client.repeat(CLAIM, &self.of_claim(&first, &number, &epoch), LONG).await?;
            let Some(row) = claimed.first() else { return Ok(false) };
            if statements::field::<i64>(row, "number")? != number {
                return Ok(false);
            }
            let looks: i64 = statements::field(row, "looks")?;
            if !self.client.repeat(CLEAR, &self.of_claim(&first, &number, &looks), LONG).await?.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn of_claim<'a>(&'a self, first: &'a i64, number: &'a i64, last: &'a i64) -> [Parameter<'a>; 4] {
        [(&self.prefix, Type::TEXT), (first, Type::INT8), (number, Type::INT8), (last, Type::INT8)]
    }

    /// See [`super::super::LogEngine::is_free`].
    pub(super) async fn is_place_free(&self, number: u64) -> Result<bool, LogError> {
        let number = number.cast_signed();
        let parameters = [(&self.prefix as _, Type::TEXT), (&number as _, Type::INT8)];
        let rows = self.client.repeat(IS_FREE, &parameters, LONG).await?;
        statements::field(rows.first().ok_or_else(statements::gone)?, "is_free")
    }

    /// See [`super::super::LogEngine::number`].
    pub(super) async fn number_of_move(&self) -> Result<u64, LogError> {
        let rows = self.client.repeat(NUMBER, &[(&self.prefix as _, Type::TEXT)], LONG).await?;
        let Some(row) = rows.first() else { return Ok(0) };
        statements::check_format(row)?;
        statements::number(row, "number")
    }

    /// See [`super::super::LogEngine::begin`].
    pub(super) async fn begin_log(
        &self,
        number: u64,
        ledger: LedgerId,
        (epoch, end): (Epoch, Seq),
    ) -> Result<bool, LogError> {
        self.make_log(ledger).await?;
        let is_new = "seals = 0 AND epoch = 0 AND tail = 0 \
                      AND EXISTS (SELECT FROM forebay_moves WHERE prefix = $1 AND number = $3)";
        let begin = statements::change(is_new, &[("epoch", "$4"), ("tail", "$5"), ("first", "$5 + 1")]);
        let (number, sealed) = (number.cast_signed(), epoch.0.cast_signed());
        let parameters: [Parameter<'_>; 5] = [
            (&self.prefix, Type::TEXT),
            (&id(ledger), Type::INT8),
            (&number, Type::INT8),
            (&sealed, Type::INT8),
            (&position(end), Type::INT8),
        ];
        let found = Found::read(&self.client.repeat(&begin, &parameters, SHORT).await?)?;
        // The answer to an earlier statement may have been lost.
        let is_there = found.owner() == Sealed { epoch, nonce: NOBODY } && found.fence.tail == end;
        Ok(found.held || is_there)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Shared;
    use super::*;

    #[test]
    fn what_removes_earlier_tries_does_nothing_when_it_comes_late() {
        let servers = Shared::get();
        servers.runtime().block_on(async {
            let (engine, first) = (servers.place(), LedgerId(0));
            engine.make_log(first).await.unwrap();
            let claimed = engine.client.repeat(CLAIM, &engine.of_claim(&0, &9, &5), LONG).await.unwrap();
            let looks: i64 = statements::field(&claimed[0], "looks").unwrap();
            // The connection breaks, and the same move goes on by another one.
            assert!(engine.claim_place(9, (first, Epoch(5))).await.unwrap());
            assert!(engine.begin_log(9, first, (Epoch(5), Seq(12))).await.unwrap());
            let cleared = engine.client.repeat(CLEAR, &engine.of_claim(&0, &9, &looks), LONG).await.unwrap();
            assert!(cleared.is_empty());
            // The same try again finds the log as it has begun.
            assert!(engine.begin_log(9, first, (Epoch(5), Seq(12))).await.unwrap());
        });
    }
}
