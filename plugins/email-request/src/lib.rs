//! EmailRequest: one object is one mail, sent once through the mail gateway.
//!
//! # Expected flow
//! `POST {gateway}/send` with the spec as JSON and the object's `Idempotency-Key`; a success is `Sent`.
//!
//! # Guarantees
//! The gateway delivers at most once per object, however often a run is repeated: the key is the object's own. Editing the spec of an
//! object that is not `Sent` sends the new content, or, where the gateway had delivered an earlier version, says so.
//!
//! # Errors
//! | answer | outcome |
//! |---|---|
//! | 2xx | `Sent` |
//! | 422, the key was used for other content | `Sent`, with a message that an earlier version was delivered |
//! | 409, the same request is in progress | retry |
//! | 408, 425, 429, 5xx, none | retry |
//! | anything else | `Failed` with its cause, re-opened by an edit of the spec |

use berth_sdk::prelude::*;

/// Asks for one mail, sent once.
#[resource(
    group = "notify.acme.io",
    version = "v1",
    kind = "EmailRequest",
    namespaced,
    status = EmailStatus,
    shortname = "mail",
    column("TO", ".spec.to"),
    column("PHASE", ".status.phase"),
    column("MESSAGE", ".status.message"),
    rule(
        "!has(oldSelf.status) || !has(oldSelf.status.phase) || oldSelf.status.phase != 'Sent' || self.spec == oldSelf.spec",
        "the mail is sent, so its spec can no longer change: create another EmailRequest, or delete this one first to use its name again"
    )
)]
pub struct EmailSpec {
    /// The mail address of the recipient.
    #[rule("self.matches('^[^@[:space:]]+@[^@[:space:]]+$')", "to must be one mail address, such as a@example.com")]
    #[schemars(length(max = 254))]
    pub to: String,
    /// Name of the mail's template at the gateway.
    #[rule(
        "self.matches('^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$')",
        "template must be a name of letters, digits, dots, underscores and dashes, such as welcome"
    )]
    #[schemars(length(min = 1, max = 128))]
    pub template: String,
    /// Language of the mail, such as `en-GB`.
    #[rule("self.matches('^[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*$')", "locale must be a language tag of BCP 47, such as en or en-GB")]
    #[schemars(length(max = 35))]
    pub locale: String,
}

/// What became of the mail.
#[data]
#[derive(Default)]
pub struct EmailStatus {
    /// How it ended; absent while it has not.
    pub phase: Option<EmailPhase>,
    /// The version of the spec that the phase is about.
    pub observed_generation: Option<i64>,
    /// What there is to know, in a sentence.
    pub message: Option<String>,
    /// `Sent`: whether the mail was delivered to the gateway.
    pub conditions: Conditions,
}

/// How a mail ends.
#[data]
pub enum EmailPhase {
    /// The gateway has taken it.
    Sent,
    /// The gateway will not take it.
    Failed,
}

/// The handler.
pub struct Mailer;

#[reconciler(progress(settled = ["Sent", "Failed"]), dead_letter(phase = "Failed"), hosts("$settings.gateway"))]
impl Reconciler for Mailer {
    type Object = EmailRequest;

    fn reconcile(mail: &EmailRequest, ctx: &Context) -> Result<Action, Error> {
        let url = format!("{}/send", ctx.setting("gateway")?.trim_end_matches('/'));
        let answer = match http::post(ctx, url).idempotency_key().json(&mail.spec).handle([409, 422]).send() {
            Ok(answer) => answer,
            Err(error) => {
                let error = Error::from(error);
                return Err(if error.verdict() == Verdict::GiveUp { refused(mail, ctx, error) } else { error });
            }
        };
        match answer.status() {
            409 => Err(answer.error().into_retry().context("the gateway is still at work on this mail")),
            422 => {
                let message = "the gateway had already delivered an earlier version of this mail, so this version was not sent";
                ctx.warn(message, &[]);
                Ok(sent(mail, ctx, "EarlierVersionDelivered", Some(message)))
            }
            _ => Ok(sent(mail, ctx, "Delivered", None)),
        }
    }
}

fn sent(mail: &EmailRequest, ctx: &Context, reason: &str, message: Option<&str>) -> Action {
    let mut status = mail.status.clone().unwrap_or_default();
    status.phase = Some(EmailPhase::Sent);
    status.message = message.map(str::to_owned);
    let sentence = message.unwrap_or("the gateway has taken the mail");
    status.conditions.set(ctx, Condition::new("Sent", true, reason, sentence).of_generation(mail.generation()));
    Action::await_change().status(status)
}

/// The host writes phase and message of a `give_up`; the condition is ours.
fn refused(mail: &EmailRequest, ctx: &Context, error: Error) -> Error {
    let mut status = mail.status.clone().unwrap_or_default();
    status.conditions.set(ctx, Condition::new("Sent", false, "Refused", error.cause()).of_generation(mail.generation()));
    error.status(status)
}

#[cfg(test)]
mod tests;
